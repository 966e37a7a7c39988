"""What runs a core: the driver, servers, credentials. Clocks and threads live here and not below."""
