"""Published data sets: what they contain, where they come from, how they are read and cached."""
