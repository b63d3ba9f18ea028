"""A deterministic simulation of whole deployments: the real bus on a simulated Redis and database, in virtual time.

scenario.py draws from a seed what happens, world.py plays it with the services of service.py and the events of
events.py. redis.py, and database.py with the modules below it, are what the services run on. record.py holds what was
seen, oracle.py decides whether that may be. run.py puts them together, and shrinks what fails;
``python -m tests.proof.simulate`` runs many.
"""
