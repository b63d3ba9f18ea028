"""What tests of busrep, and of programs on it, need: real servers on free ports. Nothing needs pytest."""
