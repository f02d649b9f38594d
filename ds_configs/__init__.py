"""DeepSpeed configurations, as JSON data. This file only makes the folder travel with the package."""
