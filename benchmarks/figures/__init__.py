"""Every figure of the documents, for one version: the catalogue, the measurements, and how they are written down."""
