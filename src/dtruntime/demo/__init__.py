"""The demonstration: a coordinator and workers on this machine that train a small real model.

`runner` starts the processes and watches them, `worker` is what each of them runs, `verdict`
checks what came out, `view` shows it.
"""
