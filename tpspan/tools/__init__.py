"""What people run: the command line and the commands behind it.

`cli` stands above the other files here and imports each of them only when its command is called.
"""
