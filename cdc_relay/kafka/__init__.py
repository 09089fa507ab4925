"""Everything that speaks to Kafka; the only imports of confluent_kafka."""
