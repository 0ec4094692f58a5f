"""How values travel between ranks: one interface, several carriers."""
