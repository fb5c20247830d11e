"""Numbers of a cluster's file from measurements on attached devices."""
