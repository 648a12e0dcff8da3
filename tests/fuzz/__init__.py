"""Fuzzing: readers of files and functions of the Python API get random damage, and answer with a result or a sentence.

    make test      a few seconds: known cases (test_corpus.py), and the same few random ones of each target each time
    make fuzz      minutes: other random cases each time; prints how many were tried and writes fuzz.json

A target (readers.py, api.py) draws a case and passes a call to `attempt`, which has the rule (attempts.py).
"""
