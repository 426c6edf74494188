"""Figures as plain data: panels of lines and dots, and pictures. `report` draws them."""
