"""The flags of each verb. A file imports torch, and the modules that do the work, inside its functions only."""
