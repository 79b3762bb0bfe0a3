"""From result.json files to what people read: tables and reports."""
