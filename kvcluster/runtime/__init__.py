"""What runs a core: the driver, servers, credentials. Clocks and threads live in this layer and not below it."""
