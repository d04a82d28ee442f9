"""Score a trained model: perplexity, multiple-choice tasks, lm-evaluation-harness."""
