"""Generators: the GANs of Table 4, and pictures of augmented features (Appendix C)."""
