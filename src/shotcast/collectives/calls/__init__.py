"""The calls of a communicator, by kind; :class:`~shotcast.collectives.communicator.Communicator` has them all."""
