"""The coordinator: where blocks lie, who may have them, and what is to be evicted, demoted, promoted and copied."""
