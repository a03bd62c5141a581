"""Every figure of the documents, of one version: which there are, how each is measured, and how it is written down."""
