from django.apps import AppConfig


class OutboxConfig(AppConfig):
    """Found by Django through ``"writer.django.outbox"`` in ``INSTALLED_APPS``."""

    name = "writer.django.outbox"
    label = "cdc_relay_outbox"
    verbose_name = "Outbox"
    default_auto_field = "django.db.models.BigAutoField"
