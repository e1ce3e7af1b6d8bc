"""A communicator's calls by kind; :class:`~shotcast.collectives.communicator.Communicator` combines them all."""
