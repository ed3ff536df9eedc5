"""Pack, deal, collate and prefetch token sequences for language-model training."""
