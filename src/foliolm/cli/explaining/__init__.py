"""What ``foliolm explain`` prints and writes."""
