"""What each command of `abc-attn` does: one module a group, one function a command, which takes the parsed arguments.

A command checks its arguments and paths first, then imports the user's controls (`--import`), and only then torch or
transformers. So no module here imports them at its top, and a mistake is reported at once.
"""
