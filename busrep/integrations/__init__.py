"""Facts in the transactions of people's frameworks: busrep.integrations.sqlalchemy, busrep.integrations.django.

Each module needs its framework, and an extra of that name. docs/frameworks.md tells how they are used, and how a bus
lives in FastAPI and Celery, which need no module.
"""
