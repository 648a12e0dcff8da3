"""Where published data sets come from: registry, download, archives, cache."""
