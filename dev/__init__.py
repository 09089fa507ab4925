"""Real MySQL, MariaDB and Kafka servers for development and tests, as one command.

Standard library only: it must run before any virtual environment exists. Nothing is installed
on the machine except (as root, on Debian, when missing) a Java runtime and Maven.
"""
