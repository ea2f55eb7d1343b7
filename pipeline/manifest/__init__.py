"""Records of what was made: digests, receipts, the manifest, and where they are kept.

A record is readable without the means of making it, so this room knows neither kernels nor container.
"""
