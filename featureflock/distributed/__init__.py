"""Ensembles on several processes: the device mesh, the launcher's environment, failure reporting."""
