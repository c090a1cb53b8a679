"""Entropy mechanism (Clip-Cov and KL-Cov): few tokens of high covariance are kept from collapsing the entropy."""
