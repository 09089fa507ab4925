"""Small real services that use cdc-relay."""
