"""The demonstration: workers train a small real model on this machine, and one of them is killed.

`worker` is what each of them runs, and what a program of your own looks like. `launcher` starts
them and replaces those that are killed, `trial` watches one run and disturbs it, `runner` does it
all twice, with and without a kill, `verdict` compares what came out, `view` shows it.
"""
