"""`pruned-rnnt report RUN`: one HTML page of a run, which needs no server and no network.

Charts are matplotlib's SVG, whose colours the page sets for light and dark; tables are JSON that
the page sorts, filters and divides into pages.

| module | content |
| --- | --- |
| `report_run` | reads a run's folder: configuration, metrics, result files |
| `cut_details` | durations and speakers of the utterances, from the prepared data |
| `scored_set` | a result with its errors: by utterance, duration, speaker and word |
| `comparison` | two results of the same set, with the significance of the difference |
| `partner` | which results are compared: those of the same data with equal settings |
| `training_charts`, `charts` | curves and bars as SVG |
| `clips`, `pictures` | audio, and pictures of spectrogram and lattice, up to a size limit |
| `tables` | the tables of the page as columns |
| `page` | the page from its template |
"""
