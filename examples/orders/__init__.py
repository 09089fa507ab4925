"""A service that takes orders, and a consumer that gives points for them."""
