"""Pictures of what came out: where a trained model looks, as in the paper's figure 2, and a run on one page."""
