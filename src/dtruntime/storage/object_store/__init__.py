"""Objects in a bucket, by obstore.

Read ``client`` first (URLs, credentials, listings), then ``object_backend`` (S3, Google Cloud
Storage, Azure); ``object_stream`` sends multipart uploads.
"""
