"""Django: the tables as migrations.

    INSTALLED_APPS = [..., "writer.django.outbox"]     # a service that writes events
    INSTALLED_APPS = [..., "writer.django.inbox"]      # a service that handles them

``python manage.py migrate`` makes the tables exactly as ``cdc-relay schema`` prints them; a table
that is there already gets the optional columns and the indexes it lacks. The writing itself is
``Outbox().add(connection, ...)`` with ``django.db.connection``, inside ``transaction.atomic()``.
"""
