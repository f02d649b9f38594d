"""The nightly measurement: how well the cluster scales, with history and an alert."""
