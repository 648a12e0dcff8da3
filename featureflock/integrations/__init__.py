"""Optional integrations with other libraries, imported when they are used."""
