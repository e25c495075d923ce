"""The control plane: reconciles SpecDecodeDeployments into workers, a speculation plan and a replica count."""
