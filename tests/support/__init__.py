"""What several of busrep's own tests and fault tests use, and its users do not."""
