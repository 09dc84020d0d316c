//! The host plane: Unix sockets on one node, TCP between nodes.
