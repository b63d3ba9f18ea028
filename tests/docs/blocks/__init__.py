"""What the blocks of the documentation need before they run, and what must be so after it: a module for each page.

Each function is an async generator: what stands before its ``yield`` prepares the block's globals, what stands behind
it checks what the block did.
"""
