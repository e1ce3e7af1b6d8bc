"""Plans of models with a Mixture of Experts, which the engine does not run."""
