"""Objects in a bucket, by obstore: the client, the backends of S3, Google Cloud Storage and Azure,
multipart uploads. Read `client` first.
"""
