"""Facts about the machine: data sheets of known parts, and what this host has. No torch at import."""
