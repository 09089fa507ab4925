"""Reading the binlog as a replica would: connection, positions, layouts, row decoding."""
