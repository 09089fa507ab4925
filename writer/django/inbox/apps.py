from django.apps import AppConfig


class InboxConfig(AppConfig):
    """Found by Django through ``"writer.django.inbox"`` in ``INSTALLED_APPS``."""

    name = "writer.django.inbox"
    label = "cdc_relay_inbox"
    verbose_name = "Inbox"
    default_auto_field = "django.db.models.BigAutoField"
