"""The jobs of ``busrep pipeline``, a module each: ``busrep/spark/job.py`` says what such a module declares."""
