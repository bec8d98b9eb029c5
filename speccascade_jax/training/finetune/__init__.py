"""Fine-tuning of T5s and decoder-only models on tasks, on meshes of devices and several hosts."""
