"""The charts of a study's page, a file for each: HTML, empty where there is nothing to show.

They draw the rows that ``rows.py`` prepares, as the picture does. Each chart has a text that says
what it shows, for those who do not see it.
"""
