"""Ensembles on several processes: the mesh, the environment of torchrun, and failure reporting."""
