"""Plan tasks: a data set's lines become tokenised rows on disk and the list of shards that will hold them."""
