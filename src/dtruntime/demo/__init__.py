"""The demonstration: workers train a small real model on this machine, and one of them is killed.

Read ``worker`` first: it is what each of them runs, and what a program of your own looks like.

- ``scenario``: how large it is, and where its files lie; ``digits``: the data and the model.
- ``demonstration``: its processes, and two runs: a *disturbed* one, and an *undisturbed* one to
  compare with.
- ``timeline``: the steps that workers note, what happened, and how long it took.
- ``proof``: each claim, checked against what the workers left; ``terminal_view`` shows it all.
"""
