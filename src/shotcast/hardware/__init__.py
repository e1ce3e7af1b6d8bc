"""Facts about the machine: data sheets of known hardware, and the hardware of this host. No torch at import."""
